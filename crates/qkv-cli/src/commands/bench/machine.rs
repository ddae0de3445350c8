//! Which machine was measured, in a line.

use std::fs;

/// This program, the CPU, the instruction set, the threads, and PyTorch where it was measured too.
pub(crate) fn told(threads: usize, torch: Option<&str>) -> String {
    let mut parts = vec![format!("qkv {}", env!("CARGO_PKG_VERSION"))];
    parts.extend(torch.map(|version| format!("PyTorch {version}")));
    parts.extend(cpu());
    parts.push(qkv::Isa::best().name().into());
    parts.push(crate::threads::told(threads));
    parts.join(", ")
}

/// What the CPU calls itself, where the system tells.
pub(crate) fn cpu() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'))?.1;
    Some(name.trim().to_string())
}
