//! Files and folders that are there whole or not at all: written under another name beside their place, brought to the
//! disk, and then renamed. A program that is killed on the way leaves what was there before.

use crate::{Error, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// The name under which something is written before it has its own: beside its place, so that renaming stays on one disk.
fn beside(path: &Path) -> Result<PathBuf> {
    let Some(name) = path.file_name() else {
        return Err(Error::invalid(format!("`{}` has no name that could be written to", path.display())));
    };
    let mut hidden = std::ffi::OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".{}.part", std::process::id()));
    Ok(path.with_file_name(hidden))
}

/// The folder that a name stands in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Brings what a folder lists to the disk. Where a folder cannot be opened as a file, which not every system allows, the
/// rename itself is all there is.
fn settle(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
}

/// Writes a file, whole or not at all.
///
/// ```
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("config.json");
/// qkv_models::files::atomic::write(&path, b"{}")?;
/// assert_eq!(std::fs::read(&path).unwrap(), b"{}");
/// # Ok::<(), qkv_models::Error>(())
/// ```
pub fn write(path: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
    write_with(path, |file| file.write_all(bytes))
}

/// Writes a file by a function that is given its beginning, whole or not at all.
pub fn write_with(path: impl AsRef<Path>, fill: impl FnOnce(&mut File) -> std::io::Result<()>) -> Result<()> {
    let path = path.as_ref();
    let part = beside(path)?;
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

/// Writes a folder by a function that fills it, whole or not at all. A folder of that name that is already there is
/// replaced; for the moment between two renames it stands aside under another name.
///
/// ```
/// # let place = tempfile::tempdir().unwrap();
/// use qkv_models::files::atomic;
///
/// let model = place.path().join("model");
/// atomic::write_folder(&model, |folder| atomic::write(folder.join("config.json"), b"{}"))?;
/// assert!(model.join("config.json").exists());
/// # Ok::<(), qkv_models::Error>(())
/// ```
pub fn write_folder(path: impl AsRef<Path>, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let path = path.as_ref();
    let part = beside(path)?;
    let aside = part.with_extension("old");
    let outcome = (|| {
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
            return Err(Error::file("write", path, error));
        }
        Ok(())
    })();
    let _ = fs::remove_dir_all(&part);
    let _ = fs::remove_dir_all(&aside);
    outcome?;
    settle(folder_of(path));
    Ok(())
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
    fn a_place_that_does_not_exist_is_named() {
        let error = write("no/such/folder/a", b"").expect_err("there is no folder");
        assert!(error.to_string().starts_with("cannot write `no/such/folder/a`: "), "{error}");
    }
}
