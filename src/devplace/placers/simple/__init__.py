"""Plans by a rule: one device, even shares, what experts and device maps do, or chance.

Other placers start from them, and are measured by them.
"""
