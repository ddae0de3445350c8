//! Bounds on the sizes of a configuration, before anything is allocated for it.

use crate::{Error, Result};

/// Rejects sizes that are zero or that no machine could hold. Each entry is a name, the size and the largest allowed.
pub(crate) fn check_sizes(sizes: &[(&str, usize, usize)]) -> Result<()> {
    for (name, found, max) in sizes {
        if *found == 0 || found > max {
            return Err(Error::invalid(format!("`{name}` is {found}, expected between 1 and {max}")));
        }
    }
    Ok(())
}
