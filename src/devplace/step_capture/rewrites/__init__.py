"""Rewrite a traced graph so that it runs fast, or on more devices."""
