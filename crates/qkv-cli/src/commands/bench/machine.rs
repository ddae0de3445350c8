//! The measured machine, in one line.

use std::fs;

/// Versions of the program and of PyTorch, the CPU, the instruction set and the threads.
pub(crate) fn describe(threads: usize, torch: Option<&str>) -> String {
    let mut parts = vec![format!("qkv {}", env!("CARGO_PKG_VERSION"))];
    parts.extend(torch.map(|version| format!("PyTorch {version}")));
    parts.extend(cpu());
    parts.push(qkv::Isa::best().name().into());
    parts.push(crate::threads::count(threads));
    parts.join(", ")
}

/// The model name of the CPU, if the system reports it.
pub(crate) fn cpu() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?.1;
    Some(name.trim().to_string())
}
