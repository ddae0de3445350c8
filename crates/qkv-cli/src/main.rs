//! The program `qkv`. Everything it does is in the library beside it, where tests and documentation can reach it.

fn main() -> std::process::ExitCode {
    qkv_cli::main(std::env::args_os())
}
