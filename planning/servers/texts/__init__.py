"""The texts that a launch command stands in: shell scripts, manifests, YAML."""
