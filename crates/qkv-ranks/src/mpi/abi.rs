//! The functions and constants of MPI's standard ABI (MPI 5.0, chapter 20) that are used here: all unsafe code of the
//! crate. A library is loaded once and stays for the life of the process.

use crate::error::{Error, Result};
use crate::launch;
use libloading::Library;
use std::ffi::{c_char, c_int, c_void};
use std::ptr;

const COMM_WORLD: usize = 0x101;
const BYTE: usize = 0x247;
const ERRORS_RETURN: usize = 0x143;
const THREAD_SERIALIZED: c_int = 2048;
const SUCCESS: c_int = 0;
const ANY_SOURCE: c_int = -1;
/// The longest text that the ABI lets a library write.
const MAX_TEXT: usize = 8192;

type InitThread = unsafe extern "C" fn(*mut c_int, *mut *mut *mut c_char, c_int, *mut c_int) -> c_int;
type OfComm = unsafe extern "C" fn(usize, *mut c_int) -> c_int;
type SetErrhandler = unsafe extern "C" fn(usize, usize) -> c_int;
type Isend = unsafe extern "C" fn(*const c_void, i64, usize, c_int, c_int, usize, *mut usize) -> c_int;
type Irecv = unsafe extern "C" fn(*mut c_void, i64, usize, c_int, c_int, usize, *mut usize) -> c_int;
type Test = unsafe extern "C" fn(*mut usize, *mut c_int, *mut c_void) -> c_int;
type Iprobe = unsafe extern "C" fn(c_int, c_int, usize, *mut c_int, *mut c_void) -> c_int;
type Abort = unsafe extern "C" fn(usize, c_int) -> c_int;
type Finalize = unsafe extern "C" fn() -> c_int;
type ErrorString = unsafe extern "C" fn(c_int, *mut c_char, *mut c_int) -> c_int;
type LibraryVersion = unsafe extern "C" fn(*mut c_char, *mut c_int) -> c_int;

/// The loaded functions. Their holder must call them one at a time.
pub(super) struct Abi {
    init_thread: InitThread,
    comm_rank: OfComm,
    comm_size: OfComm,
    set_errhandler: SetErrhandler,
    isend: Isend,
    irecv: Irecv,
    test: Test,
    iprobe: Iprobe,
    abort: Abort,
    finalize: Finalize,
    error_string: ErrorString,
    library_version: LibraryVersion,
}

/// A message that MPI reads from or writes to `bytes`.
pub(super) struct Request {
    handle: usize,
    bytes: Vec<u8>,
    done: bool,
}

impl Request {
    /// Its bytes, once it is done.
    pub fn into_bytes(self) -> Vec<u8> {
        assert!(self.done, "MPI still uses the memory of a message");
        self.bytes
    }
}

impl Abi {
    /// Loads the library.
    ///
    /// # Errors
    /// Names the first library that was tried.
    pub fn load() -> Result<Abi> {
        let mut reasons: Vec<String> = Vec::new();
        for path in launch::libraries() {
            // SAFETY: the initializers of an MPI library have no preconditions.
            match unsafe { Library::new(&path) } {
                Ok(library) => return Abi::of(Box::leak(Box::new(library)), &path.display().to_string()),
                Err(error) => reasons.push(format!("`{}` ({error})", path.display())),
            }
        }
        Err(Error::NoMpi(
            reasons.first().map_or_else(|| "nothing to load".into(), |first| format!("cannot load {first}")),
        ))
    }

    fn of(library: &'static Library, path: &str) -> Result<Abi> {
        /// A function of the library.
        ///
        /// # Safety
        /// `F` is the function's type in the standard ABI.
        unsafe fn function<F: Copy>(library: &'static Library, path: &str, name: &str) -> Result<F> {
            // SAFETY: the caller guarantees the type, and the library stays loaded.
            let found = unsafe { library.get::<F>(name.as_bytes()) };
            found.map(|symbol| *symbol).map_err(|_| Error::NoMpi(format!("`{path}` has no `{name}`")))
        }
        // SAFETY: these are the types of `mpi_abi.h`; handles are of the size of a pointer, `MPI_Count` has 64 bits.
        unsafe {
            Ok(Abi {
                init_thread: function(library, path, "MPI_Init_thread")?,
                comm_rank: function(library, path, "MPI_Comm_rank")?,
                comm_size: function(library, path, "MPI_Comm_size")?,
                set_errhandler: function(library, path, "MPI_Comm_set_errhandler")?,
                isend: function(library, path, "MPI_Isend_c")?,
                irecv: function(library, path, "MPI_Irecv_c")?,
                test: function(library, path, "MPI_Test")?,
                iprobe: function(library, path, "MPI_Iprobe")?,
                abort: function(library, path, "MPI_Abort")?,
                finalize: function(library, path, "MPI_Finalize")?,
                error_string: function(library, path, "MPI_Error_string")?,
                library_version: function(library, path, "MPI_Get_library_version")?,
            })
        }
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the text has room for the longest message.
        let message = text(|text, len| unsafe { (self.error_string)(code, text, len) });
        Err(Error::Mpi { call, message })
    }

    /// Joins the job; errors are returned from now on instead of ending it.
    pub fn init(&self) -> Result<()> {
        let mut provided = 0;
        // SAFETY: null pointers stand for arguments that are not passed.
        let code = unsafe { (self.init_thread)(ptr::null_mut(), ptr::null_mut(), THREAD_SERIALIZED, &mut provided) };
        self.check("MPI_Init_thread", code)?;
        if provided < THREAD_SERIALIZED {
            return Err(Error::NoMpi("the library cannot be called from several threads".to_owned()));
        }
        // SAFETY: two constants of the ABI.
        self.check("MPI_Comm_set_errhandler", unsafe { (self.set_errhandler)(COMM_WORLD, ERRORS_RETURN) })
    }

    /// This rank and the number of ranks.
    pub fn place(&self) -> Result<(usize, usize)> {
        let (mut rank, mut size) = (0, 0);
        // SAFETY: two integers to write to.
        self.check("MPI_Comm_rank", unsafe { (self.comm_rank)(COMM_WORLD, &mut rank) })?;
        // SAFETY: as above.
        self.check("MPI_Comm_size", unsafe { (self.comm_size)(COMM_WORLD, &mut size) })?;
        Ok((rank as usize, size as usize))
    }

    /// Starts to send.
    pub fn send(&self, bytes: Vec<u8>, to: usize, tag: u32) -> Result<Request> {
        let mut handle = 0;
        let (from, len) = (bytes.as_ptr().cast(), bytes.len() as i64);
        // SAFETY: the memory stays where it is, and unchanged, until the request is done: `Request` owns it, and one
        // that is not done is never dropped.
        let code = unsafe { (self.isend)(from, len, BYTE, to as c_int, tag as c_int, COMM_WORLD, &mut handle) };
        self.check("MPI_Isend", code)?;
        Ok(Request { handle, bytes, done: false })
    }

    /// Starts to receive.
    pub fn receive(&self, len: usize, from: usize, tag: u32) -> Result<Request> {
        let (mut handle, mut bytes) = (0, vec![0; len]);
        let to = bytes.as_mut_ptr().cast();
        // SAFETY: as for `send`; nobody reads the memory before the request is done.
        let code = unsafe { (self.irecv)(to, len as i64, BYTE, from as c_int, tag as c_int, COMM_WORLD, &mut handle) };
        self.check("MPI_Irecv", code)?;
        Ok(Request { handle, bytes, done: false })
    }

    /// Whether a request is done.
    pub fn is_done(&self, request: &mut Request) -> Result<bool> {
        if !request.done {
            let mut flag = 0;
            // SAFETY: the handle of a request that was started and is not done; a null pointer ignores the status.
            let code = unsafe { (self.test)(&mut request.handle, &mut flag, ptr::null_mut()) };
            self.check("MPI_Test", code)?;
            request.done = flag != 0;
        }
        Ok(request.done)
    }

    /// Lets the library progress messages.
    pub fn progress(&self, tag: u32) -> Result<()> {
        let mut flag = 0;
        // SAFETY: an integer to write to; a null pointer ignores the status.
        let code = unsafe { (self.iprobe)(ANY_SOURCE, tag as c_int, COMM_WORLD, &mut flag, ptr::null_mut()) };
        self.check("MPI_Iprobe", code)
    }

    /// Leaves the job.
    pub fn finalize(&self) -> Result<()> {
        // SAFETY: called once, after all requests are done.
        self.check("MPI_Finalize", unsafe { (self.finalize)() })
    }

    /// Ends the job.
    pub fn abort(&self, code: u8) -> ! {
        // SAFETY: a constant and a number.
        unsafe { (self.abort)(COMM_WORLD, c_int::from(code)) };
        std::process::exit(i32::from(code))
    }

    /// The version that the library reports, on one line.
    pub fn version(&self) -> String {
        // SAFETY: the text has room for the longest version.
        let all = text(|text, len| unsafe { (self.library_version)(text, len) });
        all.lines().next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
    }
}

/// A text that a function writes.
fn text(write: impl FnOnce(*mut c_char, *mut c_int) -> c_int) -> String {
    let (mut bytes, mut len) = (vec![0u8; MAX_TEXT], 0);
    write(bytes.as_mut_ptr().cast(), &mut len);
    bytes.truncate(usize::try_from(len).unwrap_or_default().min(MAX_TEXT));
    String::from_utf8_lossy(&bytes).trim().to_owned()
}
