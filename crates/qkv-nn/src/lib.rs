//! A small tape over a closed list of fused operations, and the layers of attention models.
#![forbid(unsafe_code)]
