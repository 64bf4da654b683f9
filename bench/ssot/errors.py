# SPDX-License-Identifier: Apache-2.0
"""The one exception that ends the tool with a single line for the user.

Called by: every module. Owns: nothing.
"""


class UserError(Exception):
    """Something the user can fix; the message says what to do. Exit status 2."""
