//! The general kernels on this CPU: the same sources, compiled by the system's C++ compiler with a header that makes a
//! fibre of each thread. For tests on machines without a card; thousands of times slower than one.

use crate::driver::{Card, Driver, Kernel, Module, Stream, TensorMap};
use crate::error::{Error, Result};
use crate::program::{EMULATED, Program};
use libloading::Library;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, fs, slice};

/// No card, but something that behaves like one.
#[derive(Debug)]
pub(crate) struct OnCpu {
    card: Card,
    compiler: PathBuf,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    allocated: HashMap<u64, Layout>,
}

/// What was compiled so far, for every card that this process emulates.
static MODULES: Mutex<Vec<(String, Arc<Loaded>)>> = Mutex::new(Vec::new());

/// A library; its kernels keep their state in statics, so one launch at a time.
#[derive(Debug)]
struct Loaded(Library, Mutex<()>);

impl Module for Loaded {
    fn any(&self) -> &dyn Any {
        self
    }
}

type Launch = unsafe extern "C" fn(*const c_char, *const u32, u32, *const u8) -> i32;

impl OnCpu {
    /// With the compiler that `CXX` names, or `c++`.
    pub fn new(capability: (u32, u32), shared_bytes: usize) -> Result<OnCpu> {
        let compiler = PathBuf::from(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        if !Command::new(&compiler).arg("--version").output().is_ok_and(|said| said.status.success()) {
            return Err(Error::NoCompiler { looked_for: vec![format!("`{}`", compiler.display())] });
        }
        let card = Card {
            name: "this CPU, as a card".into(),
            capability,
            processors: 1,
            shared_bytes,
            memory_bytes: 1 << 32,
            driver: (0, 0),
        };
        Ok(OnCpu { card, compiler, state: Mutex::default() })
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for OnCpu {
    fn drop(&mut self) {
        for (at, layout) in self.state().allocated.drain() {
            // SAFETY: it was allocated with this layout, and not freed yet.
            unsafe { dealloc(at as *mut u8, layout) }
        }
    }
}

impl Driver for OnCpu {
    fn card(&self) -> &Card {
        &self.card
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let layout = Layout::from_size_align(bytes.max(1), 256);
        let layout = layout.map_err(|_| Error::memory("buffer", format!("cannot have {bytes} bytes")))?;
        // SAFETY: the layout is not empty.
        let at = unsafe { alloc_zeroed(layout) } as u64;
        if at == 0 {
            return Err(Error::memory("buffer", format!("cannot have {bytes} bytes")));
        }
        // Nobody may count on zeros.
        // SAFETY: it was just allocated with this many bytes.
        unsafe { slice::from_raw_parts_mut(at as *mut u8, layout.size()) }.fill(0xff);
        self.state().allocated.insert(at, layout);
        Ok(at)
    }

    fn free(&self, at: u64) {
        if let Some(layout) = self.state().allocated.remove(&at) {
            // SAFETY: it was allocated with this layout.
            unsafe { dealloc(at as *mut u8, layout) }
        }
    }

    fn write(&self, to: u64, from: &[u8], _: Stream) -> Result<()> {
        // SAFETY: device memory is host memory here, and as large as the caller says.
        unsafe { slice::from_raw_parts_mut(to as *mut u8, from.len()) }.copy_from_slice(from);
        Ok(())
    }

    fn read(&self, to: &mut [u8], from: u64, _: Stream) -> Result<()> {
        // SAFETY: likewise.
        to.copy_from_slice(unsafe { slice::from_raw_parts(from as *const u8, to.len()) });
        Ok(())
    }

    fn zero(&self, at: u64, bytes: usize, _: Stream) -> Result<()> {
        // SAFETY: likewise.
        unsafe { slice::from_raw_parts_mut(at as *mut u8, bytes) }.fill(0);
        Ok(())
    }

    fn wait(&self, _: Stream) -> Result<()> {
        Ok(())
    }

    fn module(&self, program: &Program) -> Result<Arc<dyn Module>> {
        let name = program.name();
        let loaded = || MODULES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, module)) = loaded().iter().find(|(known, _)| *known == name) {
            return Ok(module.clone());
        }
        let failed = |log: String| Error::Compile { program: name.clone(), architecture: "this CPU".into(), log };
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("qkv-emulated-{}-{number}", std::process::id()));
        let told = |error: std::io::Error| failed(error.to_string());
        fs::create_dir_all(&folder).map_err(told)?;
        let (source, library) = (folder.join("kernel.cpp"), folder.join("kernel.so"));
        let table: Vec<String> = program.kernels().iter().map(|name| format!("EMULATED_KERNEL({name})")).collect();
        let text = format!("{EMULATED}{}\nEMULATED_LAUNCH({})\n", program.source(), table.join(", "));
        fs::write(&source, text).map_err(told)?;
        let mut command = Command::new(&self.compiler);
        command.args(["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off", "-o"]);
        command.arg(&library).args(program.options().iter().filter(|option| option.starts_with("-D"))).arg(&source);
        let said = command.output().map_err(told)?;
        if !said.status.success() {
            let words = String::from_utf8_lossy(&said.stderr);
            return Err(failed(words.lines().take(12).collect::<Vec<_>>().join("\n")));
        }
        // SAFETY: we just made it, and it has no initialiser but its own statics.
        let library = unsafe { Library::new(&library) }.map_err(|error| failed(error.to_string()))?;
        let _ = fs::remove_dir_all(&folder);
        let module = Arc::new(Loaded(library, Mutex::new(())));
        loaded().push((name, module.clone()));
        Ok(module)
    }

    fn kernel(&self, module: &Arc<dyn Module>, name: &'static str, threads: u32, shared: u32) -> Result<Kernel> {
        Ok(Kernel { module: module.clone(), name, function: 0, threads, shared })
    }

    fn global(&self, _: &Arc<dyn Module>, name: &'static str, _: &mut [u8]) -> Result<()> {
        Err(Error::memory("global", format!("`{name}` is not emulated")))
    }

    unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 2], _: Stream, parameters: &[*const u8]) -> Result<()> {
        let failed = |words: String| Error::Driver { doing: format!("launching `{}`", kernel.name), words };
        let Some(Loaded(library, turn)) = kernel.module.any().downcast_ref::<Loaded>() else {
            return Err(failed("a module of another driver".into()));
        };
        let name = CString::new(kernel.name).expect("a name of ours");
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the symbol is that of the header; the parameters are as the caller promises.
        let found = unsafe {
            let launch = library.get::<Launch>(b"emulated_launch\0").map_err(|error| failed(error.to_string()))?;
            launch(name.as_ptr(), grid.as_ptr(), kernel.threads, parameters[0])
        };
        if found == 1 { Ok(()) } else { Err(failed("no such kernel".into())) }
    }

    fn tensor_map(&self, _: u64, _: bool, _: [u64; 4], _: [u64; 3], _: u32) -> Result<TensorMap> {
        Err(Error::memory("tensor map", "is not emulated"))
    }

    fn timed(&self, _: Stream, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let start = std::time::Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}
