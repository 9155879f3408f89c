//! Floor 5. The wiring: start, supervise, drain in order.
