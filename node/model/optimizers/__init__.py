"""Inner optimizers (AdamW, SOAP, Muon), and compact storage for weights and moments."""
