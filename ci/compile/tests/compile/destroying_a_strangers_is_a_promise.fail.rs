//! A caller that destroys an object of another process promises that the other process is done with it.
#![allow(unused)]

use uverbs::ForeignObject;

fn destroy(object: ForeignObject) -> bool {
    { object.destroy().is_ok() }
}

fn main() {
    let _ = destroy;
}
