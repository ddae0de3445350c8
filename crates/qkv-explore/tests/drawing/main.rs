//! Pictures and files of weights, from outside.
