"""Training: the data, the tokenizer, the trainer."""
