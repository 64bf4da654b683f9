// SPDX-License-Identifier: Apache-2.0
//
// What the victim and its supervisor agree on.
#ifndef HZ3_TESTS_SCARCITY_VICTIM_H_
#define HZ3_TESTS_SCARCITY_VICTIM_H_

// The advice of the madvise call that ends the injection of faults.
enum { kVictimMarker = 0x7a33 };

#endif  // HZ3_TESTS_SCARCITY_VICTIM_H_
