//! The integration tests of the crate, in one binary: a test binary takes longer to link than its tests to run.

mod capture;
mod drawing;
mod files;
mod measures;
mod server;
