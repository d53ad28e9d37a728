"""The arithmetic of the inner optimizers (AdamW, SOAP, Muon), and weights and moments packed in fewer bits."""
