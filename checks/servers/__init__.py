"""Components of other servers, from their released packages, behind the contracts (`foredraft check vllm`)."""
