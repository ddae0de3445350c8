//! The fuzz targets as tests, in one binary.

mod formats;
mod seeds;
mod server;
