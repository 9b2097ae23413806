"""Tables of draft steps for one workload: searched, then compared with what they replace on seeds that the
search has not seen."""
