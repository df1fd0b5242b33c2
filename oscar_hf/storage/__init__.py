"""What one layer holds, apart from transformers' protocol and from attention masks."""
