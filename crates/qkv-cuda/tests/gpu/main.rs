//! The crate's integration tests in one binary: the suite on a GPU ([`device`]), on the emulation ([`emulated`]),
//! masked NaN ([`absent`]), and refusals ([`errors`]). Tests that need a GPU or a compiler say so when they are
//! skipped.

mod absent;
mod device;
mod emulated;
mod engine;
mod errors;
