//! [`Driver`] on the CPU: the general kernels compiled by the system's C++ compiler with a header that turns each
//! thread into a fiber. For tests on machines without a GPU. TMA and Hopper's kernels are not emulated.

use crate::device::{Device, Stream};
use crate::driver::{Driver, Kernel, MAX_ARGUMENTS, Module, PendingCopy, Source, TensorMap, check_later};
use crate::error::{Error, Result};
use crate::matmul::Matmul;
use crate::program::EMULATION_HEADER;
use libloading::Library;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::{env, fs, slice};

/// An emulated GPU.
#[derive(Debug)]
pub(crate) struct EmulatedDriver {
    device: Device,
    compiler: PathBuf,
    allocated: Mutex<HashMap<u64, Layout>>,
    recorded: Mutex<Recorded>,
}

/// Work that is recorded rather than run.
#[derive(Debug, Default)]
struct Recorded {
    streams: u64,
    /// By stream, while it is recorded.
    open: HashMap<u64, Vec<Work>>,
    graphs: HashMap<usize, Arc<Vec<Work>>>,
    numbers: usize,
}

/// One piece of work on a stream.
#[derive(Debug)]
enum Work {
    Launch { kernel: Kernel, grid: [u32; 2], arguments: Vec<Vec<u128>> },
    Matmul(Matmul),
    Copy { to: u64, from: u64, bytes: usize },
    Zero { ptr: u64, bytes: usize },
}

/// Modules compiled so far, shared by all emulated devices of the process. Threads that need the same module wait for
/// one compilation.
#[allow(clippy::type_complexity)] // By source: the module, or why it did not compile.
static MODULES: Mutex<Vec<(String, Arc<OnceLock<Result<Arc<Loaded>>>>)>> = Mutex::new(Vec::new());

/// A shared library. Kernels keep their state in statics: one launch at a time.
#[derive(Debug)]
struct Loaded(Library, Mutex<()>);

impl Module for Loaded {
    fn any(&self) -> &dyn Any {
        self
    }
}

/// The bytes read when the copy began: on a CPU nothing is pending.
#[derive(Debug)]
struct Copied(Vec<u8>);

impl PendingCopy for Copied {
    fn take(self: Box<Self>) -> Result<Vec<u8>> {
        Ok(self.0)
    }
}

type Launch = unsafe extern "C" fn(*const c_char, *const u32, u32, *const *const u8) -> i32;
type Sizes = unsafe extern "C" fn(*const c_char, *mut u32) -> i32;

impl EmulatedDriver {
    /// With the compiler that `CXX` names, or `c++`.
    pub fn new(capability: (u32, u32), shared_bytes: usize) -> Result<EmulatedDriver> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            let message = "its fibers are written for Linux on x86-64".into();
            return Err(Error::Driver { action: "emulating a GPU".into(), message });
        }
        let compiler = PathBuf::from(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        if !Command::new(&compiler).arg("--version").output().is_ok_and(|out| out.status.success()) {
            return Err(Error::NoCompiler { looked_for: vec![format!("`{}`", compiler.display())] });
        }
        let device = Device {
            name: "emulation on the CPU".into(),
            capability,
            processors: 1,
            shared_bytes,
            memory_bytes: 1 << 32,
            driver: (0, 0),
        };
        Ok(EmulatedDriver { device, compiler, allocated: Mutex::default(), recorded: Mutex::default() })
    }

    fn allocated(&self) -> MutexGuard<'_, HashMap<u64, Layout>> {
        self.allocated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> MutexGuard<'_, Recorded> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs work, or records it if the stream is being recorded.
    fn put(&self, stream: Stream, work: Work) -> Result<()> {
        if let Some(open) = self.recorded().open.get_mut(&stream.0) {
            open.push(work);
            return Ok(());
        }
        self.run(&work)
    }

    /// Rejects work that waits for a stream while the stream is being recorded, as CUDA does.
    fn must_run(&self, stream: Stream) -> Result<()> {
        match self.recorded().open.contains_key(&stream.0) {
            true => Err(Error::memory("copy", "to the host or from it cannot be recorded")),
            false => Ok(()),
        }
    }

    fn run(&self, work: &Work) -> Result<()> {
        // SAFETY: whoever enqueued it promised that device memory, which is host memory here, is as large.
        unsafe {
            match work {
                Work::Launch { kernel, grid, arguments } => {
                    let arguments: Vec<*const u8> = arguments.iter().map(|of| of.as_ptr().cast()).collect();
                    return self.run_kernel(kernel, *grid, &arguments);
                }
                Work::Matmul(call) => call.compute_on_host(),
                // The two may overlap.
                Work::Copy { to, from, bytes } => std::ptr::copy(*from as *const u8, *to as *mut u8, *bytes),
                Work::Zero { ptr, bytes } => slice::from_raw_parts_mut(*ptr as *mut u8, *bytes).fill(0),
            }
        }
        Ok(())
    }

    fn loaded<'k>(&self, kernel: &'k Kernel) -> Result<&'k Loaded> {
        let loaded = kernel.module.any().downcast_ref::<Loaded>();
        loaded.ok_or_else(|| failed(kernel, "a module of another driver"))
    }

    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn run_kernel(&self, kernel: &Kernel, grid: [u32; 2], arguments: &[*const u8]) -> Result<()> {
        let Loaded(library, lock) = self.loaded(kernel)?;
        let name = CString::new(kernel.name).expect("kernel names have no zero byte");
        let _lock = lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the header defines the symbol; the arguments are as the caller promises.
        let found = unsafe {
            let launch =
                library.get::<Launch>(b"emulated_launch\0").map_err(|error| failed(kernel, &error.to_string()))?;
            launch(name.as_ptr(), grid.as_ptr(), kernel.threads, arguments.as_ptr())
        };
        if found == 1 { Ok(()) } else { Err(failed(kernel, "no such kernel")) }
    }

    /// Copies of a kernel's arguments, aligned for any type.
    ///
    /// # Safety
    /// As for [`Driver::launch`].
    unsafe fn copies(&self, kernel: &Kernel, arguments: &[*const u8]) -> Result<Vec<Vec<u128>>> {
        let Loaded(library, _) = self.loaded(kernel)?;
        let name = CString::new(kernel.name).expect("kernel names have no zero byte");
        let mut sizes = [0; MAX_ARGUMENTS];
        // SAFETY: the header defines the symbol; no kernel has more arguments.
        let count = unsafe {
            let of = library.get::<Sizes>(b"emulated_sizes\0").map_err(|error| failed(kernel, &error.to_string()))?;
            of(name.as_ptr(), sizes.as_mut_ptr())
        };
        if count != arguments.len() as i32 {
            return Err(failed(kernel, "no such kernel, or with other arguments"));
        }
        let copy = |(&from, &bytes): (&*const u8, &u32)| {
            let mut to = vec![0u128; (bytes as usize).div_ceil(16)];
            // SAFETY: the argument has its parameter's type, and the copy is as large.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr().cast::<u8>(), bytes as usize) };
            to
        };
        Ok(arguments.iter().zip(&sizes).map(copy).collect())
    }

    /// Compiles a program, or reuses what was compiled earlier from the same text: `QKV_EMULATED` names a folder that
    /// the test binaries share.
    fn compile(&self, source: &Source) -> Result<Arc<Loaded>> {
        let failed =
            |log: String| Error::Compile { program: source.name.clone(), architecture: "this CPU".into(), log };
        let io = |error: std::io::Error| failed(error.to_string());
        let table: Vec<String> = source.kernels.iter().map(|name| format!("EMULATED_KERNEL({name})")).collect();
        let text = format!("{EMULATION_HEADER}{}\nEMULATED_LAUNCH({})\n", source.text, table.join(", "));
        let mut arguments = vec!["-std=c++17", "-Og", "-w", "-shared", "-fPIC", "-ffp-contract=off"];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("fma") {
            // Conversions of f16 and fused multiply-adds are instructions instead of calls.
            arguments.extend(["-mf16c", "-mfma"]);
        }
        arguments.extend(source.options.iter().map(String::as_str).filter(|option| option.starts_with("-D")));
        static FOLDERS: AtomicU64 = AtomicU64::new(0);
        let number = FOLDERS.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("qkv-emulated-{}-{number}", std::process::id()));
        let (file, mut library) = (folder.join("kernel.cpp"), folder.join("kernel.so"));
        let mut only_one = None;
        if let Some(shared) = env::var_os("QKV_EMULATED").map(PathBuf::from) {
            let mut hasher = DefaultHasher::new();
            (&self.compiler, &text, &arguments).hash(&mut hasher);
            library = shared.join(format!("{:016x}.so", hasher.finish()));
            fs::create_dir_all(&shared).map_err(io)?;
            // Whoever comes second waits for the first.
            let lock = fs::File::create(library.with_extension("lock")).map_err(io)?;
            lock.lock().map_err(io)?;
            only_one = Some(lock);
        }
        if only_one.is_none() || !library.exists() {
            fs::create_dir_all(&folder).map_err(io)?;
            fs::write(&file, text).map_err(io)?;
            // It gets its final name only once it is complete.
            let unfinished = library.with_extension("part");
            let mut command = Command::new(&self.compiler);
            let out = command.args(arguments).arg("-o").arg(&unfinished).arg(&file).output().map_err(io)?;
            if !out.status.success() {
                let log = String::from_utf8_lossy(&out.stderr);
                return Err(failed(log.lines().take(12).collect::<Vec<_>>().join("\n")));
            }
            fs::rename(unfinished, &library).map_err(io)?;
        }
        drop(only_one);
        // SAFETY: it was built from our source, and its only initializers are those of its own statics.
        let library = unsafe { Library::new(&library) }.map_err(|error| failed(error.to_string()))?;
        let _ = fs::remove_dir_all(&folder);
        Ok(Arc::new(Loaded(library, Mutex::new(()))))
    }
}

fn failed(kernel: &Kernel, message: &str) -> Error {
    Error::Driver { action: format!("launching `{}`", kernel.name), message: message.into() }
}

impl Drop for EmulatedDriver {
    fn drop(&mut self) {
        for (ptr, layout) in self.allocated().drain() {
            // SAFETY: it was allocated with this layout, and not freed yet.
            unsafe { dealloc(ptr as *mut u8, layout) }
        }
    }
}

impl Driver for EmulatedDriver {
    fn device(&self) -> &Device {
        &self.device
    }

    fn allocate(&self, bytes: usize) -> Result<u64> {
        let refused = || Error::memory("buffer", format!("of {bytes} bytes cannot be allocated"));
        let layout = Layout::from_size_align(bytes.max(1), 256).map_err(|_| refused())?;
        // SAFETY: the layout is not empty.
        let ptr = unsafe { alloc_zeroed(layout) } as u64;
        if ptr == 0 {
            return Err(refused());
        }
        // Filled with NaN, so that a kernel that relies on zeros fails.
        // SAFETY: it was just allocated with this size.
        unsafe { slice::from_raw_parts_mut(ptr as *mut u8, layout.size()) }.fill(0xff);
        self.allocated().insert(ptr, layout);
        Ok(ptr)
    }

    fn free(&self, ptr: u64) {
        if let Some(layout) = self.allocated().remove(&ptr) {
            // SAFETY: it was allocated with this layout.
            unsafe { dealloc(ptr as *mut u8, layout) }
        }
    }

    fn write(&self, to: u64, from: &[u8], stream: Stream) -> Result<()> {
        self.must_run(stream)?;
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: device memory is host memory here, and as large as the caller says.
        unsafe { slice::from_raw_parts_mut(to as *mut u8, from.len()) }.copy_from_slice(from);
        Ok(())
    }

    fn read(&self, to: &mut [u8], from: u64, stream: Stream) -> Result<()> {
        self.must_run(stream)?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: likewise.
        to.copy_from_slice(unsafe { slice::from_raw_parts(from as *const u8, to.len()) });
        Ok(())
    }

    fn read_later(&self, from: u64, bytes: usize, stream: Stream) -> Result<Box<dyn PendingCopy>> {
        check_later(bytes)?;
        let mut copy = vec![0; bytes];
        self.read(&mut copy, from, stream)?;
        Ok(Box::new(Copied(copy)))
    }

    fn copy(&self, to: u64, from: u64, bytes: usize, stream: Stream) -> Result<()> {
        if bytes == 0 { Ok(()) } else { self.put(stream, Work::Copy { to, from, bytes }) }
    }

    fn zero(&self, ptr: u64, bytes: usize, stream: Stream) -> Result<()> {
        if bytes == 0 { Ok(()) } else { self.put(stream, Work::Zero { ptr, bytes }) }
    }

    fn wait(&self, stream: Stream) -> Result<()> {
        self.must_run(stream)
    }

    fn new_stream(&self) -> Result<Stream> {
        let mut recorded = self.recorded();
        recorded.streams += 1;
        Ok(Stream(recorded.streams))
    }

    fn new_recording_stream(&self) -> Result<Stream> {
        self.new_stream()
    }

    fn begin_capture(&self, stream: Stream) -> Result<bool> {
        if stream.0 != 0 {
            self.recorded().open.insert(stream.0, Vec::new());
        }
        Ok(stream.0 != 0)
    }

    fn end_capture(&self, stream: Stream) -> Result<usize> {
        let mut recorded = self.recorded();
        let work = recorded.open.remove(&stream.0).ok_or_else(|| Error::memory("graph", "was not begun"))?;
        recorded.numbers += 1;
        let number = recorded.numbers;
        recorded.graphs.insert(number, Arc::new(work));
        Ok(number)
    }

    fn launch_graph(&self, graph: usize, stream: Stream) -> Result<()> {
        self.must_run(stream)?;
        let work = self.recorded().graphs.get(&graph).cloned();
        let work = work.ok_or_else(|| Error::memory("graph", "was not recorded"))?;
        work.iter().try_for_each(|work| self.run(work))
    }

    fn free_graph(&self, graph: usize) {
        self.recorded().graphs.remove(&graph);
    }

    fn is_capturing(&self, stream: Stream) -> Result<bool> {
        Ok(self.recorded().open.contains_key(&stream.0))
    }

    fn module(&self, source: &Source) -> Result<Arc<dyn Module>> {
        let module = {
            let mut modules = MODULES.lock().unwrap_or_else(PoisonError::into_inner);
            match modules.iter().find(|(name, _)| *name == source.name) {
                Some((_, module)) => module.clone(),
                None => {
                    let module = Arc::new(OnceLock::new());
                    modules.push((source.name.clone(), module.clone()));
                    module
                }
            }
        };
        let loaded: Arc<dyn Module> = module.get_or_init(|| self.compile(source)).clone()?;
        Ok(loaded)
    }

    fn kernel(&self, module: &Arc<dyn Module>, name: &'static str, threads: u32, shared: u32) -> Result<Kernel> {
        Ok(Kernel { module: module.clone(), name, function: 0, threads, shared })
    }

    fn global(&self, _: &Arc<dyn Module>, name: &'static str, _: &mut [u8]) -> Result<()> {
        Err(Error::memory("variable", format!("`{name}` is not emulated")))
    }

    unsafe fn launch(&self, kernel: &Kernel, grid: [u32; 2], stream: Stream, arguments: &[*const u8]) -> Result<()> {
        // A real device rejects this, too.
        assert!(arguments.len() <= MAX_ARGUMENTS, "`{}` takes {} arguments", kernel.name, arguments.len());
        if !self.is_capturing(stream)? {
            // SAFETY: as the caller promises.
            return unsafe { self.run_kernel(kernel, grid, arguments) };
        }
        // SAFETY: likewise.
        let arguments = unsafe { self.copies(kernel, arguments)? };
        self.put(stream, Work::Launch { kernel: kernel.clone(), grid, arguments })
    }

    unsafe fn matmul(&self, call: &Matmul, stream: Stream) -> Result<()> {
        self.put(stream, Work::Matmul(*call))
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
