"""The contract of a relay: what one step leaves on the device for the next one, cell by cell."""
