//! Parses `--features`: the feature maps of linear attention. [`qkv::Features`] defines the maps themselves.

use qkv::Features;
use std::str::FromStr;

/// A feature map, before `--seed` is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum FeatureMap {
    Elu,
    Relu,
    Favor { count: usize },
}

impl FeatureMap {
    /// Converts it to the library's type.
    pub fn features(self, seed: u64) -> Features {
        match self {
            FeatureMap::Elu => Features::Elu,
            FeatureMap::Relu => Features::Relu,
            FeatureMap::Favor { count } => Features::Favor { count, seed },
        }
    }
}

impl FromStr for FeatureMap {
    type Err = String;
    fn from_str(typed: &str) -> Result<FeatureMap, String> {
        match typed {
            "elu" => Ok(FeatureMap::Elu),
            "relu" => Ok(FeatureMap::Relu),
            other => match other.strip_prefix("favor:").map(str::parse) {
                Some(Ok(count)) if count > 0 => Ok(FeatureMap::Favor { count }),
                Some(_) => Err("COUNT must be a whole number of at least 1".into()),
                None => Err("expected `elu`, `relu` or `favor:COUNT`".into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_in_the_help_parses() {
        assert_eq!("elu".parse(), Ok(FeatureMap::Elu));
        assert_eq!("relu".parse(), Ok(FeatureMap::Relu));
        assert_eq!("favor:64".parse(), Ok(FeatureMap::Favor { count: 64 }));
        for bad in ["", "Elu", "gelu", "favor", "favor:", "favor:0", "favor:-1", "favor:1,2", "elu:3"] {
            assert!(bad.parse::<FeatureMap>().is_err(), "{bad}");
        }
    }

    #[test]
    fn only_random_features_take_the_seed() {
        assert_eq!(FeatureMap::Elu.features(3), Features::Elu);
        assert_eq!(FeatureMap::Favor { count: 8 }.features(3), Features::Favor { count: 8, seed: 3 });
    }
}
