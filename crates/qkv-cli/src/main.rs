//! The binary `qkv`. All of it is in the library of this crate, where tests and documentation reach it.

fn main() -> std::process::ExitCode {
    qkv_cli::main(std::env::args_os())
}
