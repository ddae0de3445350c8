//! Tools that watch unsafe code: Miri, the sanitizers, and advisories of dependencies.
//!
//! Miri interprets and knows neither AVX nor foreign functions, so it runs the views, the shared memory and the
//! portable lanes of `qkv-simd`. The sanitizers run compiled code: the unit tests of every crate with unsafe code, on
//! the best instruction set.

use crate::step::Step;
use crate::toolchain;

/// Modules of `qkv-simd` whose tests Miri can run: no intrinsics, no foreign calls, no large loops.
const MIRI_FILTERS: &str = "view:: shared:: miri::";

/// What Miri cannot run, for the summary.
const NOT_FOR_MIRI: &str = "under Miri: kernels on AVX2, AVX-512 and AMX (intrinsics), huge pages (system calls), CUDA";

/// `cargo xtask miri`.
pub fn miri() -> Vec<Step> {
    if !toolchain::nightly_has(&["miri", "rust-src"]) {
        let reason =
            "no nightly toolchain with Miri (`rustup toolchain install nightly --component miri --component rust-src`)";
        return vec![Step::skip("Miri", reason)];
    }
    let command = format!("+nightly miri test -p qkv-simd --lib -- {MIRI_FILTERS}");
    let step = Step::cargo("Miri over views and shared memory", command)
        .with("QKV_ISA", "portable")
        .with("MIRIFLAGS", "-Zmiri-ignore-leaks")
        .with("CARGO_TARGET_DIR", "target/miri");
    vec![step, Step::skip("not run", NOT_FOR_MIRI)]
}

/// `cargo xtask sanitize`.
pub fn sanitize() -> Vec<Step> {
    let Some(host) = toolchain::host().filter(|_| toolchain::nightly_has(&["rust-src"])) else {
        let reason = "no nightly toolchain with its sources (`rustup toolchain install nightly --component rust-src`)";
        return vec![Step::skip("sanitizers", reason)];
    };
    if !host.contains("linux") {
        return vec![Step::skip("sanitizers", format!("{host} is not tried"))];
    }
    let sanitizer = |name: &str, title: &str, options: &'static str| {
        let command = format!("+nightly test -Zbuild-std --target {host} -p qkv-simd -p qkv-cuda --lib");
        let step = Step::cargo(format!("{title} over the unsafe crates"), command)
            .with("RUSTFLAGS", format!("-Zsanitizer={name}"))
            .with("CARGO_TARGET_DIR", format!("target/{name}"));
        match name {
            "thread" => step.with("TSAN_OPTIONS", options),
            _ => step.with("ASAN_OPTIONS", options),
        }
    };
    vec![
        sanitizer("address", "AddressSanitizer", "detect_leaks=0"),
        sanitizer("thread", "ThreadSanitizer", "halt_on_error=1"),
    ]
}

/// `cargo xtask deny`: advisories, licenses and sources of the dependencies.
pub fn deny() -> Vec<Step> {
    if !toolchain::has_cargo_command("deny") {
        return vec![Step::skip("cargo deny", "not installed (`cargo install cargo-deny`)")];
    }
    // Advisories need a database from the network; without it, licenses, bans and sources are still checked.
    vec![Step::cargo("licenses, bans and sources", "deny check licenses bans sources")]
}
