"""Code of the loss of focal_parts.py."""


def focal(logits, labels):
    log_probs = logits.log_probs(labels)
    return -((1 - log_probs.exp()) ** 2) * log_probs
