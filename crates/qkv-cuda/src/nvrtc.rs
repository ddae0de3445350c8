//! NVRTC, CUDA's run-time compiler, loaded from the toolkit, the system or a Python package. Only a few functions are
//! bound, so that every version from 11 on works.

use crate::error::{Error, Result};
use crate::toolkit;
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr;
use std::sync::OnceLock;

type Handle = *mut std::ffi::c_void;

/// The loaded compiler.
#[derive(Debug)]
pub struct Compiler {
    library: Library,
    /// `libnvrtc-builtins`, which it looks up by name when it compiles, loaded from the same folder.
    _builtins: Vec<Library>,
    path: String,
    version: (i32, i32),
}

/// Library names, newest first.
const NAMES: [&str; 5] = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so", "nvrtc64_130_0.dll", "nvrtc64_120_0.dll"];

impl Compiler {
    /// The compiler of this machine, searched for once.
    pub fn find() -> Result<&'static Compiler> {
        static FOUND: OnceLock<Result<Compiler>> = OnceLock::new();
        FOUND
            .get_or_init(|| Compiler::among(toolkit::candidates("QKV_NVRTC", &NAMES, "libnvrtc.so", "cuda_nvrtc")))
            .as_ref()
            .map_err(Clone::clone)
    }

    /// The first of these files that loads and reports a version.
    pub(crate) fn among(candidates: Vec<PathBuf>) -> Result<Compiler> {
        let mut looked_for = Vec::new();
        for path in candidates {
            looked_for.push(format!("`{}`", path.display()));
            let builtins = path
                .parent()
                .filter(|folder| folder.is_absolute())
                .map_or(Vec::new(), |folder| toolkit::entries(folder, "libnvrtc-builtins.so"));
            // SAFETY: as below.
            let loaded = builtins.iter().filter_map(|path| unsafe { Library::new(path) }.ok()).collect();
            // SAFETY: NVRTC has no initializer with preconditions; a file that is no library is an error.
            let Ok(library) = (unsafe { Library::new(&path) }) else { continue };
            let (mut major, mut minor) = (0, 0);
            // SAFETY: the symbol has this type in every version.
            let works = unsafe {
                library
                    .get::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int>(b"nvrtcVersion\0")
                    .is_ok_and(|version| version(&mut major, &mut minor) == 0)
            };
            if works {
                return Ok(Compiler {
                    library,
                    _builtins: loaded,
                    path: path.display().to_string(),
                    version: (major, minor),
                });
            }
        }
        Err(Error::NoCompiler { looked_for })
    }

    /// Its path.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Its version, `(major, minor)`.
    pub fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a source to machine code for an architecture such as `sm_80`.
    pub fn compile(&self, program: &str, source: &str, architecture: &str, options: &[String]) -> Result<Vec<u8>> {
        let failed = |log: String| Error::Compile { program: program.into(), architecture: architecture.into(), log };
        let text = |s: &str| CString::new(s).map_err(|_| failed("it contains a zero byte".into()));
        let (source, name) = (text(source)?, text(&format!("{program}.cu"))?);
        let mut options = options.iter().map(|option| text(option)).collect::<Result<Vec<_>>>()?;
        options.push(text(&format!("-arch={architecture}"))?);
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut handle: Handle = ptr::null_mut();
        // SAFETY: the symbols have these types in every version; all pointers are to memory that outlives the calls,
        // and the program is destroyed once.
        unsafe {
            let create = self.symbol::<unsafe extern "C" fn(
                *mut Handle,
                *const c_char,
                *const c_char,
                c_int,
                *const *const c_char,
                *const *const c_char,
            ) -> c_int>(b"nvrtcCreateProgram\0", failed)?;
            let compile = self.symbol::<unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int>(
                b"nvrtcCompileProgram\0",
                failed,
            )?;
            let destroy =
                self.symbol::<unsafe extern "C" fn(*mut Handle) -> c_int>(b"nvrtcDestroyProgram\0", failed)?;
            let code = create(&mut handle, source.as_ptr(), name.as_ptr(), 0, ptr::null(), ptr::null());
            if code != 0 {
                return Err(failed(self.message(code)));
            }
            let code = compile(handle, options.len() as c_int, options.as_ptr());
            let result = if code == 0 {
                self.bytes(handle, b"nvrtcGetCUBINSize\0", b"nvrtcGetCUBIN\0", failed)
            } else {
                let log = self.bytes(handle, b"nvrtcGetProgramLogSize\0", b"nvrtcGetProgramLog\0", failed);
                let log = log.map(|log| String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned());
                Err(failed(format!("{}: {}", self.message(code), log.unwrap_or_default())))
            };
            destroy(&mut handle);
            match result {
                Ok(cubin) if cubin.is_empty() => Err(failed("the compiler returned no machine code".into())),
                result => result,
            }
        }
    }

    /// The message of an error code.
    fn message(&self, code: c_int) -> String {
        // SAFETY: the symbol has this type, and what it returns is a static text.
        let text = unsafe {
            self.library
                .get::<unsafe extern "C" fn(c_int) -> *const c_char>(b"nvrtcGetErrorString\0")
                .map(|lookup| CStr::from_ptr(lookup(code)).to_string_lossy().into_owned())
        };
        text.unwrap_or_else(|_| format!("error {code}"))
    }

    /// # Safety
    /// The symbol has the type `F`.
    unsafe fn symbol<F: Copy>(&self, name: &[u8], failed: impl Fn(String) -> Error) -> Result<F> {
        // SAFETY: as the caller promises.
        unsafe { self.library.get::<F>(name).map(|symbol| *symbol).map_err(|error| failed(error.to_string())) }
    }

    /// # Safety
    /// `handle` is a program, and the two symbols return the size and the bytes of one of its outputs.
    unsafe fn bytes(
        &self,
        handle: Handle,
        size: &[u8],
        get: &[u8],
        failed: impl Fn(String) -> Error + Copy,
    ) -> Result<Vec<u8>> {
        // SAFETY: as the caller promises; the buffer has the size that the library reported.
        unsafe {
            let size = self.symbol::<unsafe extern "C" fn(Handle, *mut usize) -> c_int>(size, failed)?;
            let get = self.symbol::<unsafe extern "C" fn(Handle, *mut c_char) -> c_int>(get, failed)?;
            let mut len = 0;
            let code = size(handle, &mut len);
            let mut bytes = vec![0u8; len];
            let code = if code == 0 { get(handle, bytes.as_mut_ptr().cast()) } else { code };
            if code == 0 { Ok(bytes) } else { Err(failed(self.message(code))) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_nvrtc_the_error_lists_where_it_was_looked_for_and_how_to_get_it() {
        let missing = Compiler::among(vec!["no-such-nvrtc.so".into()]).unwrap_err();
        assert!(missing.to_string().contains("no-such-nvrtc.so"), "{missing}");
        assert!(missing.hint().unwrap().contains("pip install nvidia-cuda-nvrtc"));
    }

    #[test]
    fn a_file_that_is_no_library_is_skipped() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"not a library").unwrap();
        assert!(matches!(Compiler::among(vec![file.path().into()]), Err(Error::NoCompiler { .. })));
    }
}
