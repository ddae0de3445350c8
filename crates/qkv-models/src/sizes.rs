//! Bounds on the sizes of a configuration, before anything is allocated for it.

use crate::{Error, Result};

/// Refuses sizes that are zero or that no machine could hold: the name, the size and the largest one.
pub(crate) fn check_sizes(sizes: &[(&str, usize, usize)]) -> Result<()> {
    for (name, found, max) in sizes {
        if *found == 0 || found > max {
            return Err(Error::invalid(format!("`{name}` is {found}, expected between 1 and {max}")));
        }
    }
    Ok(())
}
