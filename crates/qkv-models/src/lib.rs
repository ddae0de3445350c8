//! Attention models that train and translate.
#![forbid(unsafe_code)]
