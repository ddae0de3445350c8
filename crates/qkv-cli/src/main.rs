//! The binary `qkv`. All code is in this crate's library, where tests and documentation can reach it.

fn main() -> std::process::ExitCode {
    qkv_cli::main(std::env::args_os())
}
