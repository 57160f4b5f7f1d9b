"""The order in which tests run on xdist workers, chosen so that devices are not idle while tests wait for them."""
