"""The arithmetic of the inner optimizers: AdamW, SOAP and Muon, each over the parameters that it moves."""
