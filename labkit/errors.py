"""The one exception for a user's mistake.

Every refusal in labkit says, in one sentence, what was given, what is allowed and what to do.
The command line turns it into that sentence and exit status 2; a notebook shows it as it is.
"""


class BadRequest(ValueError):
    """A request that cannot be carried out as it was made; nothing has been changed."""
