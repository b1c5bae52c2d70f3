"""What `cpd profile` measures: how long the steps of one model take on this device."""
