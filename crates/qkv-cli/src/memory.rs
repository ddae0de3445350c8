//! The memory of this machine and of this process, as Linux reports it. Elsewhere, only a bound beyond any machine is
//! known.

use std::fs;

/// Available memory to assume if the system does not report it.
const BEYOND_ANY_MACHINE: u128 = 1 << 42;

/// The peak memory of this process, in bytes.
pub(crate) fn peak() -> Option<u64> {
    field("/proc/self/status", "VmHWM:")
}

/// The memory that is still available, in bytes.
pub(crate) fn available() -> u128 {
    field("/proc/meminfo", "MemAvailable:").map_or(BEYOND_ANY_MACHINE, u128::from)
}

/// A field in kB of a file in `/proc`, in bytes.
pub(crate) fn field(file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Bytes in GiB.
pub(crate) fn gib(bytes: u128) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_peak_is_known_where_the_system_tells_it() {
        assert_eq!(peak().is_some(), Path::new("/proc/self/status").exists());
    }
}
