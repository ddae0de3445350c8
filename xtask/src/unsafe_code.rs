//! Tools that check unsafe code: Miri and the sanitizers; and checks of dependencies.
//!
//! Miri is an interpreter and supports neither AVX nor foreign functions, so it runs the views, the shared memory, the
//! team and the portable lanes of `qkv-simd`, under both of its aliasing models, in a minute. The sanitizers run
//! compiled code: the unit tests of `qkv-simd` and `qkv-cuda`, on the best instruction set.

use crate::step::Step;
use crate::toolchain;

/// Modules of `qkv-simd` whose tests Miri can run: no intrinsics, no foreign calls, no large loops.
const MIRI_FILTERS: &str = "view:: shared:: team:: features:: philox:: miri::";

/// Tests with a rayon pool, whose queues (crossbeam-epoch) violate Stacked Borrows.
const RAYON: &str = "shared:: rows_written_by_several_workers";

/// Code that Miri cannot run, for the summary.
const NOT_FOR_MIRI: &str = "under Miri: kernels on AVX2, AVX-512 and AMX (intrinsics), huge pages (system calls), CUDA";

/// `cargo xtask miri`.
pub fn miri() -> Vec<Step> {
    if !toolchain::nightly_has(&["miri", "rust-src"]) {
        let reason =
            "no nightly toolchain with Miri (`rustup toolchain install nightly --component miri --component rust-src`)";
        return vec![Step::skip("Miri", reason)];
    }
    let step = |model: &str, flags: &str, skipped: &str| {
        let skipped: String = skipped.split_whitespace().map(|name| format!(" --skip {name}")).collect();
        let command = format!("+nightly miri test -p qkv-simd --lib -- {MIRI_FILTERS}{skipped}");
        Step::cargo(format!("Miri with {model}"), command)
            .with("QKV_ISA", "portable")
            .with("MIRIFLAGS", format!("-Zmiri-ignore-leaks{flags}"))
            .with("CARGO_TARGET_DIR", "target/miri")
    };
    vec![
        step("Stacked Borrows", "", RAYON),
        step("Tree Borrows", " -Zmiri-tree-borrows", ""),
        Step::skip("not run", NOT_FOR_MIRI),
    ]
}

/// `cargo xtask sanitize`. ThreadSanitizer needs a standard library that is instrumented too, AddressSanitizer works
/// without.
pub fn sanitize() -> Vec<Step> {
    let Some(host) = toolchain::host().filter(|_| toolchain::nightly_has(&["rust-std"])) else {
        let reason = "no nightly toolchain (`rustup toolchain install nightly --component rust-src`)";
        return vec![Step::skip("sanitizers", reason)];
    };
    if !host.contains("linux") {
        return vec![Step::skip("sanitizers", format!("{host} is not tried"))];
    }
    let has_sources = toolchain::nightly_has(&["rust-src"]);
    let build = if has_sources { " -Zbuild-std" } else { "" };
    let sanitizer = |name: &str, title: &str, options: &'static str| {
        let command = format!("+nightly test{build} --target {host} -p qkv-simd -p qkv-cuda --lib");
        let step = Step::cargo(format!("{title} over the unsafe crates"), command)
            .with("RUSTFLAGS", format!("-Zsanitizer={name}"))
            .with("CARGO_TARGET_DIR", format!("target/{name}"));
        match name {
            "thread" => step.with("TSAN_OPTIONS", options),
            _ => step.with("ASAN_OPTIONS", options),
        }
    };
    let address = sanitizer("address", "AddressSanitizer", "detect_leaks=0");
    let thread = match has_sources {
        true => sanitizer("thread", "ThreadSanitizer", "halt_on_error=1"),
        false => Step::skip("ThreadSanitizer", "no sources (`rustup component add rust-src --toolchain nightly`)"),
    };
    vec![address, thread]
}

/// `cargo xtask deny`: advisories, licenses and sources of the dependencies.
pub fn deny() -> Vec<Step> {
    if !toolchain::has_cargo_command("deny") {
        return vec![Step::skip("cargo deny", "not installed (`cargo install cargo-deny`)")];
    }
    let advisories = match toolchain::can_fetch_advisories() {
        true => Step::cargo("advisories", "deny check advisories"),
        false => Step::skip("advisories", "their database, RustSec's, cannot be reached"),
    };
    vec![
        Step::cargo("licenses, bans and sources", "deny check --hide-inclusion-graph licenses bans sources"),
        advisories,
    ]
}
