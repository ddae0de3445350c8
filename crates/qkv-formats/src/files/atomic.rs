//! Atomic writes: files and folders are written under a hidden name beside their final one, flushed to disk, and
//! renamed. A process that is killed leaves the previous contents in place, and litter that [`remove_litter`] removes.

use crate::{Error, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Ends of the hidden names `.NAME.PID.END` under which this process writes, replaces and deletes. They are in the
/// folder of the final name, so that renaming stays within one file system.
const PART: &str = "part";
const OLD: &str = "old";
const GONE: &str = "gone";

/// The hidden name of a path.
fn hidden(path: &Path, end: &str) -> Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(Error::invalid(format!("`{}` has no name that could be written to", path.display())));
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.{end}", std::process::id()));
    Ok(path.with_file_name(hidden))
}

/// The parent folder of a path.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Flushes a folder's entries to disk. Does nothing on systems that cannot open a folder as a file.
fn settle(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
}

/// Writes a file atomically.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("config.json");
/// qkv_formats::files::atomic::write(&path, b"{}")?;
/// assert_eq!(std::fs::read(&path).unwrap(), b"{}");
/// # Ok::<(), qkv_formats::Error>(())
/// ```
pub fn write(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    write_with(path, |file| file.write_all(bytes))
}

/// Writes a file atomically, with a function that fills it.
pub fn write_with(path: impl AsRef<Path>, fill: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let path = path.as_ref();
    let part = hidden(path, PART)?;
    let written = File::create(&part)
        .and_then(|mut file| {
            fill(&mut file)?;
            file.sync_all()
        })
        .and_then(|()| fs::rename(&part, path));
    if let Err(error) = written {
        let _ = fs::remove_file(&part);
        return Err(Error::file("write", path, error));
    }
    settle(folder_of(path));
    Ok(())
}

/// Writes a folder atomically, with a function that fills it. An existing folder of that name is replaced; between the
/// two renames it has a hidden name.
///
/// ```
/// # let place = tempfile::tempdir().unwrap();
/// use qkv_formats::files::atomic;
///
/// let model = place.path().join("model");
/// atomic::write_folder(&model, |folder| atomic::write(folder.join("config.json"), b"{}"))?;
/// assert!(model.join("config.json").exists());
/// # Ok::<(), qkv_formats::Error>(())
/// ```
pub fn write_folder<E: From<Error>>(
    path: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let path = path.as_ref();
    let (part, aside) = (hidden(path, PART)?, hidden(path, OLD)?);
    let outcome = (|| -> Result<(), E> {
        if part.exists() {
            fs::remove_dir_all(&part).map_err(|e| Error::file("remove", &part, e))?;
        }
        fs::create_dir_all(&part).map_err(|e| Error::file("write", &part, e))?;
        fill(&part)?;
        settle(&part);
        let replaced = path.is_dir();
        if replaced {
            fs::rename(path, &aside).map_err(|e| Error::file("rename", path, e))?;
        }
        if let Err(error) = fs::rename(&part, path) {
            if replaced {
                let _ = fs::rename(&aside, path);
            }
            return Err(Error::file("write", path, error).into());
        }
        Ok(())
    })();
    let _ = fs::remove_dir_all(&part);
    let _ = fs::remove_dir_all(&aside);
    outcome?;
    settle(folder_of(path));
    Ok(())
}

/// Deletes a folder. It is renamed first, so that a kill leaves litter rather than half a folder under its name.
///
/// # Errors
/// If the folder cannot be renamed or removed.
pub fn remove_folder(path: &Path) -> Result<()> {
    let gone = hidden(path, GONE)?;
    let removed = fs::rename(path, &gone).and_then(|()| fs::remove_dir_all(&gone));
    removed.map_err(|e| Error::file("remove", path, e))
}

/// Removes what killed processes left in a folder: hidden files and folders that were being written, replaced or
/// deleted. A folder that was set aside and not replaced gets its name back. Files of live processes are left alone.
///
/// # Errors
/// If an entry cannot be removed or renamed.
pub fn remove_litter(folder: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let Some((name, pid, end)) = path.file_name().and_then(|name| name.to_str()).and_then(parse_hidden) else {
            continue;
        };
        if is_alive(pid) {
            continue;
        }
        let place = folder.join(name);
        let done = match (end, path.is_dir()) {
            (OLD, _) if !place.exists() => fs::rename(&path, place),
            (_, true) => fs::remove_dir_all(&path),
            (_, false) => fs::remove_file(&path),
        };
        done.map_err(|e| Error::file("remove", &path, e))?;
    }
    Ok(())
}

/// Whether a name is that of an entry that is being written, replaced or deleted, or was when its process ended.
pub fn is_unfinished(name: &str) -> bool {
    parse_hidden(name).is_some()
}

/// Name, process id and end of a hidden name.
fn parse_hidden(name: &str) -> Option<(&str, u32, &str)> {
    let (rest, end) = name.strip_prefix('.')?.rsplit_once('.')?;
    let (name, pid) = rest.rsplit_once('.')?;
    [PART, OLD, GONE].contains(&end).then_some((name, pid.parse().ok()?, end))
}

/// Whether another process with this id is running; `false` on systems without `/proc`, which is safe because callers
/// hold the lock of the folder.
fn is_alive(pid: u32) -> bool {
    pid != std::process::id() && Path::new("/proc").join(pid.to_string()).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(folder)
            .expect("a folder")
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_write_that_fails_leaves_what_was_there() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("a");
        write(&path, b"first").expect("written");
        let refused = write_with(&path, |file| {
            file.write_all(b"sec")?;
            Err(std::io::Error::other("the disk is full"))
        });
        assert!(refused.expect_err("refused").to_string().ends_with("the disk is full"));
        assert_eq!(fs::read(&path).expect("it is there"), b"first");
        assert_eq!(names(place.path()), ["a"]);
    }

    #[test]
    fn a_folder_is_replaced_as_a_whole_or_stays() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("model");
        write_folder(&path, |folder| write(folder.join("old"), b"1")).expect("written");
        let refused = write_folder(&path, |folder| {
            write(folder.join("new"), b"2")?;
            Err(Error::invalid("not now"))
        });
        assert!(refused.is_err());
        assert_eq!(names(&path), ["old"]);
        write_folder(&path, |folder| write(folder.join("new"), b"2")).expect("written");
        assert_eq!(names(&path), ["new"]);
        assert_eq!(names(place.path()), ["model"]);
    }

    #[test]
    fn litter_of_dead_processes_is_removed_and_a_folder_set_aside_comes_back() {
        let place = tempfile::tempdir().expect("a folder");
        let path = |name: &str| place.path().join(name);
        // No system has a process id this large.
        let dead = u32::MAX - 1;
        fs::create_dir(path(&format!(".00000007.{dead}.part"))).expect("created");
        fs::write(path(&format!(".config.json.{dead}.part")), b"{").expect("written");
        fs::create_dir(path(&format!(".00000005.{dead}.gone"))).expect("created");
        fs::create_dir(path(&format!(".00000006.{dead}.old"))).expect("created");
        fs::write(path(".hidden.part"), b"somebody's").expect("written");
        let live = std::process::Command::new("sleep").arg("30").spawn();
        let kept = live.as_ref().map_or(".hidden.part".into(), |live| format!(".x.{}.part", live.id()));
        fs::write(path(&kept), b"").expect("written");
        remove_litter(place.path()).expect("removed");
        let mut expected = vec![".hidden.part".to_owned(), "00000006".to_owned()];
        if cfg!(target_os = "linux") && live.is_ok() {
            expected.push(kept);
        }
        expected.sort();
        assert_eq!(names(place.path()), expected);
        if let Ok(mut live) = live {
            live.kill().and_then(|()| live.wait()).expect("it was started here");
        }
    }

    #[test]
    fn a_folder_is_removed_as_a_whole() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("00000007");
        fs::create_dir(&path).expect("created");
        fs::write(path.join("weights"), b"1").expect("written");
        remove_folder(&path).expect("removed");
        assert_eq!(names(place.path()), [""; 0]);
        assert!(remove_folder(&path).is_err());
    }

    #[test]
    fn a_place_that_does_not_exist_is_named() {
        let error = write("no/such/folder/a", b"").expect_err("there is no folder");
        assert!(error.to_string().starts_with("cannot write `no/such/folder/a`: "), "{error}");
    }
}
