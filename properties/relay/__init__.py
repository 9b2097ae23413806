"""The contract of a relay: values that one step leaves on the device for the next step, cell by cell."""
