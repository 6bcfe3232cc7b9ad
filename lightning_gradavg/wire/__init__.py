"""How gradients travel between the ranks: in which type (codecs), by which way (route), and how (exchange)."""
