#![no_main]

/// The recipe whose settings the input changes.
const BASE: &str = "name = 'tiny'\n[data]\ntask = 'copy'\npairs = 30\ndev_pairs = 4\n[model]\nkind = 'transformer'\n";

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| drop(qkv_fuzz::bodies::recipe(bytes, BASE)));
