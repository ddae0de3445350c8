//! The lock of a run's folder: one process trains in it at a time. It is an operating system lock on a file, so the
//! lock of a dead process is free; the file names the holder for the error message of others.

use crate::{Error, Result};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::Path;

/// The lock file in a run's folder.
pub(super) const LOCK: &str = "run.lock";

/// A lock that is held until it is dropped.
#[derive(Debug)]
pub(super) struct RunLock {
    file: File,
}

impl RunLock {
    /// Locks a run's folder.
    ///
    /// # Errors
    /// If another process holds the lock; names its process id and host.
    pub fn acquire(folder: &Path) -> Result<RunLock> {
        let path = folder.join(LOCK);
        let file = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
        let mut file = file.map_err(|e| Error::file("open", &path, e))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.take(1024).read_to_string(&mut holder);
                let holder = if holder.trim().is_empty() { "another process" } else { holder.trim() };
                return Err(Error::invalid(format!("`{}` is in use by {holder}", folder.display()))
                    .with_hint("wait until it ends, or stop it: it saves a checkpoint first"));
            }
            Err(TryLockError::Error(e)) => return Err(Error::file("lock", &path, e)),
        }
        let holder = format!("process {} on {}\n", std::process::id(), host());
        let written = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| file.write_all(holder.as_bytes()));
        written.map_err(|e| Error::file("write", &path, e))?;
        Ok(RunLock { file })
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // The file stays: removing it would let a third process lock a file that nobody else sees.
        let _ = self.file.set_len(0);
        let _ = self.file.unlock();
    }
}

/// The name of this machine.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let name = name.or_else(|| std::env::var("HOSTNAME").ok()).or_else(|| std::env::var("COMPUTERNAME").ok());
    name.map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).unwrap_or_else(|| "this host".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_the_second_is_told_who_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let held = RunLock::acquire(folder.path()).unwrap();
        let refused = RunLock::acquire(folder.path()).unwrap_err().to_string();
        assert!(refused.contains(&format!("in use by process {} on ", std::process::id())), "{refused}");
        drop(held);
        assert!(RunLock::acquire(folder.path()).is_ok());
    }

    #[test]
    fn the_lock_of_a_dead_process_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(LOCK), "process 1 on elsewhere\n").unwrap();
        let held = RunLock::acquire(folder.path()).unwrap();
        let holder = std::fs::read_to_string(folder.path().join(LOCK)).unwrap();
        assert!(holder.starts_with(&format!("process {} on ", std::process::id())), "{holder}");
        drop(held);
    }
}
