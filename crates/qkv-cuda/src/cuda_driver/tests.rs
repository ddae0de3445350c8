//! Tests the driver against a fake `libcuda`, compiled here: contexts are pushed and popped around every call, and
//! structures arrive as `cuda.h` declares them.

use super::*;
use std::io::Write;
use std::process::Command;

/// The fake library, loaded twice: as the driver, and for its own counters.
struct Fake {
    driver: CudaDriver,
    counters: libloading::Library,
    _folder: tempfile::TempDir,
}

impl Fake {
    /// `None`, with a message, if there is no C compiler.
    fn new() -> Option<Fake> {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (folder.path().join("fake.c"), folder.path().join("libcuda.so"));
        std::fs::write(&source, include_str!("fake_libcuda.c")).unwrap();
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let built = Command::new(&compiler).args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status();
        if !built.is_ok_and(|status| status.success()) {
            let _ = writeln!(std::io::stderr(), "skipped: no C compiler for the fake driver");
            return None;
        }
        let cuda = Box::leak(Box::new(LibCuda::open(library.as_os_str()).unwrap()));
        let driver = CudaDriver::with_library(cuda, 0, Cache::at(folder.path().join("cache"))).unwrap();
        // SAFETY: the library is ours, without initializers.
        let counters = unsafe { libloading::Library::new(&library) }.unwrap();
        Some(Fake { driver, counters, _folder: folder })
    }

    fn count(&self, name: &str) -> c_int {
        // SAFETY: the functions of `fake_libcuda.c` that report a number take nothing.
        unsafe { self.counters.get::<unsafe extern "C" fn() -> c_int>(name.as_bytes()).unwrap()() }
    }

    fn fail(&self, on: bool) {
        // SAFETY: `fake_fail` takes a number.
        unsafe { self.counters.get::<unsafe extern "C" fn(c_int)>(b"fake_fail").unwrap()(c_int::from(on)) }
    }

    fn kernel(&self) -> Kernel {
        let module: Arc<dyn Module> = Arc::new(Loaded(1));
        self.driver.kernel(&module, "any", 64, 50_000).unwrap()
    }
}

#[test]
fn every_call_leaves_the_stack_of_contexts_as_it_found_it() {
    let Some(fake) = Fake::new() else { return };
    let driver = &fake.driver;
    assert_eq!((driver.device().name.as_str(), driver.device().is_hopper()), ("fake H200", true));
    let mut bytes = [0u8; 4];
    let ptr = driver.allocate(4).unwrap();
    driver.write(ptr, &[1, 2, 3, 4], Stream(0)).unwrap();
    driver.read(&mut bytes, ptr, Stream(0)).unwrap();
    assert_eq!(bytes, [1, 2, 3, 4]);
    driver.zero(ptr, 4, Stream(0)).unwrap();
    driver.read(&mut bytes, ptr, Stream(0)).unwrap();
    assert_eq!((bytes, fake.count("fake_depth")), ([0; 4], 0));
    let mut depth = 0;
    let work = &mut || {
        depth = fake.count("fake_depth");
        driver.wait(Stream(0))
    };
    assert_eq!(driver.timed(Stream(0), work).unwrap(), 1.5);
    assert_eq!((depth, fake.count("fake_depth")), (1, 0), "current during the work, popped after it");
    driver.free(ptr);
    assert_eq!(fake.count("fake_depth"), 0);
}

#[test]
fn a_call_that_fails_pops_its_context_and_carries_the_message_of_the_driver() {
    let Some(fake) = Fake::new() else { return };
    fake.fail(true);
    let error = fake.driver.allocate(8).unwrap_err().to_string();
    assert!(error.contains("allocating 8 bytes") && error.contains("CUDA_ERROR_FAKE: refused by the fake"), "{error}");
    assert!(fake.driver.timed(Stream(0), &mut || Ok(())).is_err());
    assert_eq!(fake.count("fake_depth"), 0);
    fake.fail(false);
    let refused = fake.driver.timed(Stream(0), &mut || Err(Error::memory("x", "is refused")));
    assert_eq!((refused.unwrap_err(), fake.count("fake_depth")), (Error::memory("x", "is refused"), 0));
    let panicked = std::panic::catch_unwind(|| fake.driver.timed(Stream(0), &mut || panic!("in the work")));
    assert!(panicked.is_err());
    assert_eq!(fake.count("fake_depth"), 0);
}

#[test]
fn launches_and_tensor_maps_arrive_as_declared() {
    let Some(fake) = Fake::new() else { return };
    let (kernel, argument) = (fake.kernel(), 42u64);
    let arguments = [(&raw const argument).cast()];
    // SAFETY: the fake reads one u64.
    unsafe {
        fake.driver.launch(&kernel, [3, 2], Stream(7), &arguments).unwrap();
        fake.driver.launch_dependent(&kernel, [3, 2], Stream(7), &arguments).unwrap();
    }
    assert_eq!((fake.count("fake_launches"), fake.count("fake_dependent")), (2, 1));
    let map = fake.driver.tensor_map(4096, true, [64, 10, 2, 1], [128, 1280, 2560], 16).unwrap();
    assert_eq!(map.0, [0x0101_0101_0101_0101; 16]);
}

#[test]
fn a_stream_says_whether_it_is_captured_and_the_default_one_never_is() {
    let Some(fake) = Fake::new() else { return };
    // The fake captures stream 7.
    let captured = [0, 6, 7].map(|stream| fake.driver.is_capturing(Stream(stream)).unwrap());
    assert_eq!(captured, [false, false, true]);
    assert_eq!(fake.count("fake_depth"), 0);
}

#[test]
fn copies_of_any_length_arrive_whole() {
    let Some(fake) = Fake::new() else { return };
    let driver = &fake.driver;
    for len in [1, HALF - 1, HALF, HALF + 1, 3 * HALF + 5] {
        let (sent, mut found) = ((0..len).map(|at| (at * 7 + at / 251) as u8).collect::<Vec<_>>(), vec![0; len]);
        let ptr = driver.allocate(len).unwrap();
        driver.write(ptr, &[9; 64][..len.min(64)], Stream(0)).unwrap();
        driver.write(ptr, &sent, Stream(0)).unwrap();
        driver.read(&mut found, ptr, Stream(0)).unwrap();
        assert!(found == sent, "{len} bytes");
        driver.free(ptr);
    }
    assert_eq!(fake.count("fake_depth"), 0);
    assert!(fake.count("fake_pageable") == 0, "a copy went past the page-locked memory");
}

#[test]
fn a_copy_that_is_taken_later_has_what_was_there_when_it_began() {
    let Some(fake) = Fake::new() else { return };
    let driver = &fake.driver;
    let ptr = driver.allocate(8).unwrap();
    driver.write(ptr, &[1; 8], Stream(0)).unwrap();
    let first = driver.read_later(ptr, 8, Stream(0)).unwrap();
    driver.write(ptr, &[2; 8], Stream(0)).unwrap();
    let second = driver.read_later(ptr, 8, Stream(0)).unwrap();
    driver.write(ptr, &[3; 8], Stream(0)).unwrap();
    assert_eq!([first.take().unwrap(), second.take().unwrap()], [vec![1; 8], vec![2; 8]]);
    // A copy that nobody takes returns its slot, and so does one that was taken.
    drop(driver.read_later(ptr, 8, Stream(0)).unwrap());
    assert_eq!(driver.read_later(ptr, 8, Stream(0)).unwrap().take().unwrap(), [3; 8]);
    assert_eq!(driver.slots.unused(), 2);
    assert!(driver.read_later(ptr, 65, Stream(0)).is_err(), "more bytes than a slot has");
    driver.free(ptr);
    assert_eq!(fake.count("fake_depth"), 0);
}
