"""`oscar-hf bench`: speed and memory against the rivals of the same run, correctness checked in the timed run."""
