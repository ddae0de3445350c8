//! The crate's integration tests in one binary; those that count allocations are in another (`memory`).
//!
//! | module | what holds |
//! | --- | --- |
//! | `conformance` | every case of the suite, against the definition |
//! | `gradients` | every gradient, against finite differences in f64 |
//! | `golden` | a few dozen small attentions, against PyTorch |
//! | `absent`, `nonfinite`, `sizes` | masked keys have no effect; NaN and ±∞; numbers of any magnitude |
//! | `deterministic` | the same bits for any number of threads, batch and cache |
//! | `properties` | what is true of any attention: convexity, packing, shared heads, pooled weights |
//! | `decode`, `linear`, `rarer` | decoding, linear attention, hard and sparse selection, beyond the suite |
//! | `into`, `errors` | calls into the caller's memory; typed errors |

mod absent;
mod conformance;
mod decode;
mod deterministic;
mod errors;
mod golden;
mod gradients;
mod into;
mod linear;
mod nonfinite;
mod properties;
mod rarer;
mod sizes;
