"""What published serving points say of a deployment: a factor on its passes, and how sure a simulated time is."""
