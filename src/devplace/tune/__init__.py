"""Plans and ops measured on the devices of this computer, and what is learnt from it."""
