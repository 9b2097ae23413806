"""The contract of an adaptive step controller: how many tokens the next round drafts."""
