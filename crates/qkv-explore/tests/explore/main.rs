//! The integration tests of the crate, in one binary: linking a test binary takes longer than running its tests.

mod capture;
mod drawing;
mod files;
mod measures;
mod server;
