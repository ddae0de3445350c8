//! `cargo xtask test`: what CI runs. Cheapest first, so that a slip shows at once.

use crate::step::Step;
use crate::{browser, nvrtc, toolchain, unsafe_code};
use std::time::{SystemTime, UNIX_EPOCH};

/// Targets that `qkv` is checked for besides the host, where their standard library is installed.
const TARGETS: [&str; 2] = ["aarch64-unknown-linux-gnu", "wasm32-unknown-unknown"];

/// The promises that every instruction set keeps: a test target of `qkv` each.
const PROMISES: [&str; 5] = ["conformance", "deterministic", "absent", "sizes", "memory"];

const ALL_TYPES: &str = "f32,f64,bf16,f16";

/// The steps; with `full`, every case on every instruction set, in every type.
pub fn steps(full: bool) -> Vec<Step> {
    let mut steps = vec![Step::cargo("format", "fmt --all --check")];
    let library = nvrtc::library();
    let tests = |mut step: Step| {
        if let Ok(library) = &library {
            step = step.with("QKV_NVRTC", library.display().to_string());
        }
        if full { step.with("QKV_EVERY_CASE", "1") } else { step }
    };
    steps.extend([
        Step::check("a browser for the explorer's tests", "browser", browser::installed),
        Step::cargo("lints", "clippy --workspace --all-targets -- -D warnings"),
        tests(Step::cargo("tests and doc tests", "test --workspace").with("CARGO_INCREMENTAL", "0")),
    ]);
    if let Err(reason) = &library {
        steps.push(Step::skip("CUDA programs for sm_80 and sm_90a", reason.as_str()));
    }
    steps.extend(promises(full));
    steps.extend([
        Step::cargo("docs", "doc --workspace --no-deps").with("RUSTDOCFLAGS", "-D warnings"),
        Step::cargo("qkv with every feature", "check -p qkv --all-features"),
        Step::cargo("packages", PACKAGE),
    ]);
    steps.extend(targets());
    if full {
        steps.extend(unsafe_code::miri());
        steps.extend(unsafe_code::sanitize());
        steps.extend(unsafe_code::deny());
    }
    steps
}

/// Packs every crate that is published, as `cargo publish` would.
pub const PACKAGE: &str = "package --workspace --exclude xtask --exclude qkv-conformance --exclude qkv-fuzz --no-verify --allow-dirty --quiet";

/// Checks `qkv` for other targets.
pub fn targets() -> Vec<Step> {
    let step = |target: &str| {
        let name = format!("qkv for {target}");
        match toolchain::has_target(target) {
            true => Step::cargo(name, format!("check -p qkv --target {target}")),
            false => Step::skip(name, format!("not installed (`rustup target add {target}`)")),
        }
    };
    TARGETS.into_iter().map(step).collect()
}

/// The promises on each instruction set of this CPU but the best, with which all tests ran. In an ordinary run, each
/// promise is tried in types drawn by a seed; in a full one, in all types for which the instruction set computes
/// something else.
fn promises(full: bool) -> Vec<Step> {
    let seed = std::env::var("QKV_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_secs()));
    let mut draw = Draw(seed);
    let mut steps = Vec::new();
    for (isa, types) in instruction_sets() {
        let drawn = if full { types.to_string() } else { draw.some_of(types) };
        // As part of the workspace, so that nothing is compiled again with other features.
        let targets: String = PROMISES.iter().map(|promise| format!(" --test {promise}")).collect();
        let name = format!("promises on {isa} in {drawn}");
        let step = Step::cargo(name, format!("test --workspace{targets}")).with("CARGO_INCREMENTAL", "0");
        let step = step.with("QKV_ISA", isa).with("QKV_TYPES", drawn).with("QKV_SEED", seed.to_string());
        steps.push(if full { step.with("QKV_EVERY_CASE", "1") } else { step });
    }
    steps
}

/// The instruction sets of this CPU but the best, each with the types for which it computes something else than the
/// next.
fn instruction_sets() -> Vec<(&'static str, &'static str)> {
    let mut found = vec![("portable", ALL_TYPES)];
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            found.push(("avx2", ALL_TYPES));
        }
        if std::is_x86_feature_detected!("avx512bf16") {
            // AMX computes f32 and f16 in bf16x3 arithmetic where it pays, so AVX-512 is tested in every type.
            found.push(("avx512", ALL_TYPES));
            // On a CPU without AMX this is the best, and `QKV_ISA` changes nothing.
            found.push(("avx512bf16", "bf16"));
        }
    }
    found
}

/// A small generator for the draw: SplitMix64.
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// One or two of the names in a list, in its order.
    fn some_of(&mut self, names: &str) -> String {
        let names: Vec<&str> = names.split(',').collect();
        let picked = [self.next(), self.next()].map(|draw| draw as usize % names.len());
        let chosen = names.iter().enumerate().filter(|(at, _)| picked.contains(at)).map(|(_, &name)| name);
        chosen.collect::<Vec<_>>().join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_draw_depends_on_its_seed_alone_and_reaches_every_type() {
        let draws = |seed| (0..50).map(|_| Draw(seed).some_of(ALL_TYPES)).collect::<Vec<_>>();
        assert_eq!(draws(7), draws(7));
        let mut draw = Draw(1);
        let many: Vec<String> = (0..100).map(|_| draw.some_of(ALL_TYPES)).collect();
        for name in ALL_TYPES.split(',') {
            assert!(many.iter().any(|drawn| drawn.split(',').any(|drawn| drawn == name)), "{name}");
        }
        assert_eq!(draw.some_of("bf16"), "bf16");
    }
}
