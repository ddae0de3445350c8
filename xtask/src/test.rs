//! `cargo xtask test`: what CI runs. The cheapest steps come first, so that a slip shows at once.

use crate::step::Step;
use crate::suites::Again;
use crate::{browser, cycles, lines, mpich, nvrtc, python, toolchain, unsafe_code, words};

/// Targets other than the host for which `qkv` is checked if their standard library is installed.
const TARGETS: [&str; 2] = ["aarch64-unknown-linux-gnu", "wasm32-unknown-unknown"];

/// The promises that every instruction set keeps: tests of attention, selected by substrings of their names.
const PROMISES: &str = "conformance:: deterministic:: absent:: sizes:: memory_of_";

/// The same without memory, which does not depend on the instruction set and takes longest without vector instructions.
const PORTABLE_PROMISES: &str = "conformance:: deterministic:: absent:: sizes::";

/// The binaries that contain them.
const PROMISING: &[&str] = &["attention", "memory"];

const ALL_TYPES: &str = "f32,f64,bf16,f16";

/// The steps; with `full`, every case on every instruction set and in every type.
pub fn steps(full: bool) -> Vec<Step> {
    let mut steps = vec![
        Step::cargo("format", "fmt --all --check"),
        Step::check("width of lines", "lines", lines::check),
        Step::check("circles of files", "cycles", cycles::check),
        Step::check("retired words", "words", words::check),
    ];
    let (library, mpi) = (nvrtc::library(), mpich::library());
    let tests = |mut step: Step| {
        if let Ok(library) = &library {
            step = step.with("QKV_NVRTC", library.display().to_string());
        }
        if let Ok(Some(library)) = &mpi {
            step = step.with("QKV_MPI", library.display().to_string());
        }
        if full { step.with("QKV_EVERY_CASE", "1") } else { step.with("QKV_SAMPLE", BEST_SAMPLE) }
    };
    steps.extend([
        Step::check("a browser for the explorer's tests", "browser", browser::installed),
        // Includes the one feature that nothing in the workspace enables; the tests are compiled without it.
        Step::cargo("lints", "clippy --workspace --all-targets --features qkv/ndarray -- -D warnings"),
        tests(Step::tests("tests and doc tests", promises(full)))
            .with("CARGO_INCREMENTAL", "0")
            .with("QKV_EMULATED", emulated()),
    ]);
    if let Err(reason) = &library {
        steps.push(Step::skip("CUDA programs for sm_80 and sm_90a", reason.as_str()));
    }
    if let Err(reason) = &mpi {
        steps.push(Step::skip("ranks over MPI", reason.as_str()));
    }
    steps.extend(python::numpy_steps());
    steps.extend([
        Step::cargo("docs", "doc --workspace --no-deps").with("RUSTDOCFLAGS", "-D warnings"),
        Step::cargo("packages", PACKAGE),
    ]);
    steps.extend(targets());
    if full {
        steps.extend(unsafe_code::miri());
        steps.extend(unsafe_code::sanitize());
        steps.extend(unsafe_code::deny());
        steps.extend(neon());
    }
    steps
}

/// The folder in which test binaries share the kernels compiled by the C++ compiler.
fn emulated() -> String {
    let folder = std::path::absolute("target/emulated").unwrap_or_else(|_| "target/emulated".into());
    folder.display().to_string()
}

/// Packs every published crate, as `cargo publish` would.
pub const PACKAGE: &str = concat!(
    "package --workspace --no-verify --allow-dirty --quiet --exclude xtask --exclude figures --exclude qkv-conformance",
    " --exclude qkv-fuzz --exclude qkv-python --exclude qkv-tests --exclude qkv-simd-tests --exclude qkv-nn-tests",
    " --exclude qkv-ranks-tests",
);

/// Checks `qkv` for other targets; warnings are errors there too.
pub fn targets() -> Vec<Step> {
    let step = |target: &str| {
        let name = format!("qkv for {target}");
        match toolchain::has_target(target) {
            true => Step::cargo(name, format!("clippy -p qkv -p qkv-simd --target {target} -- -D warnings")),
            false => Step::skip(name, format!("not installed (`rustup target add {target}`)")),
        }
    };
    TARGETS.into_iter().map(step).collect()
}

/// The kernels and the promises on aarch64, with NEON, run by QEMU on any other machine.
pub fn neon() -> Vec<Step> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    const LINKER: &str = "aarch64-linux-gnu-gcc";
    const QEMU: &str = "qemu-aarch64";
    let missing = match [LINKER, QEMU].into_iter().find(|program| !toolchain::has_program(program)) {
        _ if !toolchain::has_target(TARGET) => format!("not installed (`rustup target add {TARGET}`)"),
        Some(program) => format!("no `{program}` (Debian's `gcc-aarch64-linux-gnu` and `qemu-user` have both)"),
        None => String::new(),
    };
    if !missing.is_empty() {
        return vec![Step::skip("NEON", missing)];
    }
    let step = |name: &str, tests: String| {
        Step::cargo(name, format!("test --release --target {TARGET} --target-dir target/neon {tests}"))
            .with("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
            .with("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("{QEMU} -L /usr/aarch64-linux-gnu"))
            .with("QKV_SAMPLE", "0.02") // half an hour, emulated
    };
    vec![
        step("kernels on NEON", "-p qkv-simd --all-features --lib".into()),
        step("promises on NEON", format!("-p qkv-tests --test attention -- {PROMISES}")),
    ]
}

/// Fraction of the cases that an ordinary run draws for the best instruction set.
const BEST_SAMPLE: &str = "0.25";

/// Fraction of the cases that an ordinary run draws for another instruction set.
const SAMPLE: &str = "0.1";

/// The same fraction without vector instructions, where a case takes five times as long.
const PORTABLE_SAMPLE: &str = "0.03";

/// The promises on each instruction set of this CPU except the best, on which all tests run: in the types for which it
/// computes differently from the next one, over a sample of the cases, or over all of them in a full run. `QKV_SEED`
/// repeats a sample; the tests print theirs.
fn promises(full: bool) -> Vec<Again> {
    let again = |(isa, types): (&str, &str)| {
        let sample = if isa == "portable" { PORTABLE_SAMPLE } else { SAMPLE };
        let cases = if full { ("QKV_EVERY_CASE", "1".into()) } else { ("QKV_SAMPLE", sample.into()) };
        let environment = vec![("QKV_ISA", isa.into()), ("QKV_TYPES", types.into()), cases];
        let (binaries, filters) = match isa == "portable" && !full {
            true => (&PROMISING[..1], PORTABLE_PROMISES),
            false => (PROMISING, PROMISES),
        };
        Again { binaries, filters, environment }
    };
    instruction_sets().into_iter().map(again).collect()
}

/// The instruction sets of this CPU except the best, each with the types for which it computes differently from the
/// next one.
fn instruction_sets() -> Vec<(&'static str, &'static str)> {
    let mut found = vec![("portable", ALL_TYPES)];
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f") {
            found.push(("avx2", ALL_TYPES));
        }
        if std::is_x86_feature_detected!("avx512bf16") {
            // AMX computes f32 and f16 in bf16x3 arithmetic where that is faster, so AVX-512 is tested in every type.
            found.push(("avx512", ALL_TYPES));
            // On a CPU without AMX this is the best instruction set, and `QKV_ISA` changes nothing.
            found.push(("avx512bf16", "bf16"));
        }
    }
    found
}
