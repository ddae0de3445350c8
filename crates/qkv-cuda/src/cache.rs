//! Compiled kernels on disk. An entry's name is a hash of everything its code depends on, and its content carries a
//! checksum: a truncated or damaged entry is compiled again. Entries appear whole or not at all, and several processes
//! may write the same one at once.

use crate::error::{Error, Result};
use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: &[u8; 8] = b"qkvcubin";

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// The user's cache: `QKV_CUDA_CACHE`, or `qkv/kernels` in the system's cache folder.
    pub fn of_the_user() -> Cache {
        let named = env::var_os("QKV_CUDA_CACHE").filter(|name| !name.is_empty()).map(PathBuf::from);
        let system = || {
            let caches = env::var_os("XDG_CACHE_HOME").filter(|name| !name.is_empty()).map(PathBuf::from);
            let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".cache"));
            Some(caches.or_else(home)?.join("qkv").join("kernels"))
        };
        Cache { folder: named.or_else(system).unwrap_or_else(|| env::temp_dir().join("qkv-kernels")) }
    }

    /// A cache in this folder.
    pub fn at(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: folder.into() }
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The number of entries, and their size in bytes.
    pub fn size(&self) -> (usize, u64) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return (0, 0) };
        let sizes = entries.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "cubin"));
        sizes.fold((0, 0), |(count, bytes), entry| (count + 1, bytes + entry.metadata().map_or(0, |meta| meta.len())))
    }

    /// The entry of this key or, if there is none, what `make` returns, which is stored. A cache that cannot be written
    /// is not an error.
    pub fn get(&self, name: &str, key: &Key, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<Vec<u8>> {
        let path = self.folder.join(format!("{name}-{}.cubin", key.0));
        if let Some(code) = fs::read(&path).ok().and_then(|bytes| content(&bytes)) {
            return Ok(code);
        }
        let code = make()?;
        let _ = self.put(&path, &code);
        Ok(code)
    }

    fn put(&self, path: &Path, code: &[u8]) -> Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let failed = |error: std::io::Error| Error::Cache { folder: self.folder.clone(), reason: error.to_string() };
        fs::create_dir_all(&self.folder).map_err(failed)?;
        // Written under a temporary name and renamed, so that the final name always refers to a whole file.
        let own = format!(".{}-{}.part", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed));
        let part = self.folder.join(own);
        let mut bytes = Vec::with_capacity(24 + code.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&(code.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&check(code).to_le_bytes());
        bytes.extend_from_slice(code);
        let done = fs::write(&part, bytes).and_then(|()| fs::rename(&part, path));
        if done.is_err() {
            let _ = fs::remove_file(&part);
        }
        done.map_err(failed)
    }

    /// Checks that it can be written, for `qkv doctor`.
    pub fn writable(&self) -> Result<()> {
        let probe = self.folder.join(format!(".{}.probe", std::process::id()));
        let tried = fs::create_dir_all(&self.folder).and_then(|()| fs::write(&probe, b""));
        let _ = fs::remove_file(&probe);
        tried.map_err(|error| Error::Cache { folder: self.folder.clone(), reason: error.to_string() })
    }
}

/// A hash of what an entry depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key(String);

impl Key {
    /// The key of a source with its options, the architecture and the compiler's version.
    pub fn new(source: &str, options: &[String], architecture: &str, compiler: (i32, i32)) -> Key {
        let half = |salt: u64| {
            let mut hasher = DefaultHasher::new();
            (salt, source, options, architecture, compiler, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
            hasher.finish()
        };
        Key(format!("{:016x}{:016x}", half(1), half(2)))
    }
}

fn check(code: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    code.hash(&mut hasher);
    hasher.finish()
}

/// The code of an entry, if its checksum holds.
fn content(bytes: &[u8]) -> Option<Vec<u8>> {
    let word = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let code = bytes.get(24..)?;
    let whole = bytes.get(..8)? == MAGIC && word(8)? == code.len() as u64 && word(16)? == check(code);
    (whole && !code.is_empty()).then(|| code.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn key(source: &str) -> Key {
        Key::new(source, &["-O3".into()], "sm_90a", (13, 0))
    }

    #[test]
    fn an_entry_is_made_once_and_again_if_it_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path().join("deep/er"));
        let made = Cell::new(0);
        let get = |source: &str| {
            let make = || {
                made.set(made.get() + 1);
                Ok(vec![1, 2, 3])
            };
            cache.get("forward", &key(source), make).unwrap()
        };
        assert_eq!((get("a"), get("a"), made.get()), (vec![1, 2, 3], vec![1, 2, 3], 1));
        get("b");
        assert_eq!((made.get(), cache.size().0), (2, 2));
        for entry in fs::read_dir(cache.folder()).unwrap().flatten() {
            let mut bytes = fs::read(entry.path()).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(entry.path(), &bytes[..]).unwrap();
        }
        assert_eq!((get("a"), made.get()), (vec![1, 2, 3], 3));
        for entry in fs::read_dir(cache.folder()).unwrap().flatten() {
            fs::write(entry.path(), b"qkv").unwrap();
        }
        assert_eq!((get("b"), made.get()), (vec![1, 2, 3], 4));
    }

    #[test]
    fn keys_depend_on_everything_that_the_code_does() {
        let all = [
            key("a"),
            key("b"),
            Key::new("a", &[], "sm_90a", (13, 0)),
            Key::new("a", &["-O3".into()], "sm_80", (13, 0)),
            Key::new("a", &["-O3".into()], "sm_90a", (12, 9)),
        ];
        assert!(all.iter().enumerate().all(|(at, key)| !all[..at].contains(key)));
    }

    #[test]
    fn a_cache_that_cannot_be_written_does_not_stop_a_kernel() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::at(file.path().join("below a file"));
        assert_eq!(cache.get("forward", &key("a"), || Ok(vec![7])).unwrap(), [7]);
        assert!(matches!(cache.writable(), Err(Error::Cache { .. })));
    }
}
