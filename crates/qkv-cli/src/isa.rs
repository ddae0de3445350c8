//! `QKV_ISA`: the instruction set of the kernels. The library ignores an unknown name; the program refuses it, so that
//! nobody measures something other than they think.

use crate::failure::Failure;
use qkv::Isa;
use std::env;

/// The environment variable.
pub(crate) const VARIABLE: &str = "QKV_ISA";

/// Refuses a `QKV_ISA` that names no instruction set of this CPU.
pub(crate) fn check() -> Result<(), Failure> {
    match env::var_os(VARIABLE) {
        Some(name) => check_name(&name.to_string_lossy()),
        None => Ok(()),
    }
}

fn check_name(name: &str) -> Result<(), Failure> {
    if Isa::named(name).is_some() {
        return Ok(());
    }
    let available: Vec<&str> = Isa::available().into_iter().map(Isa::name).collect();
    Err(Failure::new(format!("`{VARIABLE}={name}` names no instruction set of this CPU"))
        .hint(format!("unset it, or set it to one of {}", available.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_instruction_set_that_is_available_may_be_named() {
        assert!(Isa::available().into_iter().all(|isa| check_name(isa.name()).is_ok()));
        let refused = check_name("foo").unwrap_err().to_string();
        assert!(refused.contains("`QKV_ISA=foo`") && refused.contains("portable"), "{refused}");
    }
}
